"""What would be done, decided on values alone: plans of steps for a stack, a wake, a layout, a resize, and for making room."""
