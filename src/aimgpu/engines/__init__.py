"""The programs that run models, and the launchers that start them.

`protocols` says what an engine and a launcher are. An engine turns an Instance into a command line, knows when it is ready and
reads its log; a launcher starts, finds again and stops what it started, and nothing else.
"""
