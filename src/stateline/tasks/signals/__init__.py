"""Tasks on recorded signals: speech, EEG, images."""
