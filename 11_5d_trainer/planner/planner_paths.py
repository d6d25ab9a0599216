"""The one place that puts the trainer and the chapters on the planner's import path.

After `import planner_paths`, `from options import Config` is the trainer's own class: what is planned and
rehearsed is what runs.
"""

import sys
from pathlib import Path

TRAINER = Path(__file__).resolve().parents[1]
if str(TRAINER) not in sys.path:
    sys.path.insert(1, str(TRAINER))  # after the folder of the script that runs
import paths  # noqa: E402, F401  finds the chapters
