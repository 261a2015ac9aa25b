"""Who is served next: priority classes, slots, rates, breakers. Start at `dispatcher.Dispatcher`."""
