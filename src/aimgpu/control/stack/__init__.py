"""The stack file: YAML in, `Stack` of domain types out. Start at `stack_file.parse_stack`."""
