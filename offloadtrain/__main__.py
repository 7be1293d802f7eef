"""`python -m offloadtrain` is `offloadtrain`."""

import sys

from offloadtrain.cli import main

sys.exit(main())
