"""The person's variables on a rank: described, sent, completed, defined anew, and what of them hangs on a group."""
