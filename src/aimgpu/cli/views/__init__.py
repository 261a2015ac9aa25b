"""How results are printed: tables, lines and JSON bodies. No I/O beyond the terminal."""
