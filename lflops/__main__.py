"""Run the command line when Python is started as `python -m lflops`."""

import sys

from lflops.cli.main import main

sys.exit(main())
