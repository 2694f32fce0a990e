"""`python -m holdall` is the command `holdall`."""

from holdall.cli import main

if __name__ == "__main__":
    main()
