"""``python -m aimgpu``: the command line, where the program itself is not on the path."""

from aimgpu.cli.entry import main

if __name__ == "__main__":
    main()
