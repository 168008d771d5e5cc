"""Build once, keep for ever: from generated source to code that is loaded in this process."""
