"""Times the cores: the same as `python -m pallas_kernels.bench`, whose options it takes."""

import sys

from pallas_kernels.bench.__main__ import main

if __name__ == '__main__':
    sys.exit(main())
