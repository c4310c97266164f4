"""What conductor, router and simulator share about placement. It needs no other room."""
