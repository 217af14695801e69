"""At which precision entries are stored: what each should have, who steps down, and the work that brings it there."""
