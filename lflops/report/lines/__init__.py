"""Facts of a profile as plain lines and sentences, without rich or matplotlib. All other reports take them from here."""
