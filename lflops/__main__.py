"""`python -m lflops`: the shell."""

import sys

from lflops.cli import main

sys.exit(main())
