"""The engine `command`: a program of the user's that serves OpenAI's API. Start at `engine.CommandEngine`."""
