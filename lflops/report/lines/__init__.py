"""Facts of a profile as plain lines and sentences, without a library. All other reports take them from here."""
