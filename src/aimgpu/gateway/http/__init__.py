"""HTTP/1.1 on both sides: callers, exchanges, pooled connections to engines."""
