"""How each model server is asked to prefill, to answer, and to say what it can do."""
