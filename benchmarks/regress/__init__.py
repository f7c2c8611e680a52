"""Whether a change of the package has changed anything: one line for each of many results, to be compared by diff."""
