"""The study of "Decoupling Positional and Symbolic Attention Behavior" (PS): canonical tasks, exact heads, theorems."""
