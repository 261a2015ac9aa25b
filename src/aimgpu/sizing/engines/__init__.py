"""What each engine allocates beyond the weights, and the flags that hold it to that."""
