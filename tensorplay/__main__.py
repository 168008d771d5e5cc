"""`python -m tensorplay`."""

from .cli import main

raise SystemExit(main())
