"""For all tests: programs that they start must be able to get Ctrl-C, also where the runner itself was started without it."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so; an ignored signal is inherited through exec, a handler is not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
