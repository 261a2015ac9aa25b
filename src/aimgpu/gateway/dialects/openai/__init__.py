"""OpenAI's API where an engine does not offer all of it: several choices, tools, responses, tokens, ranking, speech."""
