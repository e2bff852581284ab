"""Values on their way between the notebook and a rank."""
