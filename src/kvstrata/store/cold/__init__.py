"""What the store does with the disk: find chains of blocks there, read them, write what memory has no room for."""
