"""The transfer of values between the notebook and a rank."""
