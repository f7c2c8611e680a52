"""Doors: the package's operations for arrays that live elsewhere. Imported when such an array arrives."""
