"""vLLM: `engine` makes the command line and asks for health, `log` reads what it prints while it starts and when it dies."""
