"""``python -m lambdahat``: the command line."""

from lambdahat.cli import main

if __name__ == "__main__":
    main()
