"""How training scales over ranks: what was measured, and models of it. Without torch."""
