"""The management API and the door in front: how routes are declared, and the pages that show the state."""
