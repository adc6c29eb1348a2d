"""``python -m tf_memsaver``: the command line."""

from tf_memsaver.cli import main

if __name__ == "__main__":
    main()
