"""What would be done: plans of steps for a stack, a layout, a resize, and for making room."""
