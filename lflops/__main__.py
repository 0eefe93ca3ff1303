"""`python -m lflops`: the shell."""

import sys

from lflops.cli.main import main

sys.exit(main())
