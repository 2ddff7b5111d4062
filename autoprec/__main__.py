"""``python -m autoprec``: the ``autoprec`` command."""

import sys

from autoprec.cli import main

if __name__ == "__main__":
    sys.exit(main())
