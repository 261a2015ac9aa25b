"""How good a place is: the fleet as arrays, prices, penalties, packing. Start at `chooser.Chooser`."""
