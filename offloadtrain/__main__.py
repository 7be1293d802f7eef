"""`python -m offloadtrain` is `offloadtrain`."""

import sys

from offloadtrain.cli.main import main

sys.exit(main())
