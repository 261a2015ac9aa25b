"""How much an engine would spend on a grammar or a regular expression: `syntax` reads them, `paths` bounds their cost."""
