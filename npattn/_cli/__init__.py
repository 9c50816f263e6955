"""The three commands of ``npattn``: one file each."""
