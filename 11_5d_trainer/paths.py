"""The one place that puts the in_depth/ folders of the chapters on the import path.

After `import paths`, `from gradient_reducers import BucketedReducer` imports the class that chapter 02
teaches. The trainer contains no technique of its own: what you read in a chapter is what runs here.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for folder in sorted(HERE.parent.glob("[01][0-9]_*/in_depth")):
    if str(folder) not in sys.path:
        sys.path.insert(1, str(folder))  # before installed packages, after the folder of the script that runs
