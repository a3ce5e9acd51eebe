"""Records of named states: who they are, where they came from, where they lie."""
