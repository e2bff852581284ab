"""Write a rank's variables to a folder, and put them together again.

Values are described as JSON and tensors (`describing.py`), so that most of them are loaded without running
anything of the folder (`rebuilding.py`). Definitions of cells and pickles need the person's trust.
"""
