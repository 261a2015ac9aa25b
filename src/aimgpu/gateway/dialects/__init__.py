"""Other APIs than OpenAI's, translated at the edge."""
