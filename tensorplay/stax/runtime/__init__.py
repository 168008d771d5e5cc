"""What is left at call time: allocate, launch, call the library, return."""
