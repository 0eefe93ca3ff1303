"""`python -m lflops`: the command line."""

import sys

from lflops.cli.main import main

sys.exit(main())
