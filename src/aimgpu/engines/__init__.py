"""The programs that run models, and the launchers that start them.

`protocols` says what an Engine and a Launcher are. An Engine turns an Instance into a command line, knows when it is ready and
reads its log; a Launcher starts, finds again and stops what it started, and nothing else.
"""
