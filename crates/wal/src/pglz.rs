//! Decompression of PostgreSQL's own format (`pglz_decompress`, `common/pg_lzcompress.c`, PostgreSQL 18).
//!
//! A control byte, from its lowest bit on, says of the next eight items what they are: 0 a byte as it is, 1 a copy of
//! what was written before. A copy takes two bytes: the lower four bits of the first are its length less 3, the upper
//! four are the upper bits of the distance, and the second byte is the rest of the distance. A length of 18 goes on in
//! a third byte, which is added.

/// The compressed bytes do not make sense, or do not fill the destination exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

/// Decompresses all of `source` into exactly all of `dest`.
///
/// # Errors
/// When they do not fit together. What is in `dest` then means nothing.
pub fn decompress(mut source: &[u8], dest: &mut [u8]) -> Result<(), Corrupt> {
    const SHORT_LEN: usize = 18;
    let mut at = 0;
    while at < dest.len() {
        let Some((&control, rest)) = source.split_first() else { break };
        source = rest;
        if control == 0
            && let Some((plain, rest)) = source.split_first_chunk::<8>()
            && let Some(place) = dest.get_mut(at..at + 8)
        {
            place.copy_from_slice(plain);
            source = rest;
            at += 8;
            continue;
        }
        for bit in 0..8 {
            if at == dest.len() {
                break;
            }
            let Some((&first, rest)) = source.split_first() else { break };
            source = rest;
            if control >> bit & 1 == 0 {
                dest[at] = first;
                at += 1;
                continue;
            }
            let (&second, rest) = source.split_first().ok_or(Corrupt)?;
            source = rest;
            let mut len = usize::from(first & 0x0F) + 3;
            let distance = usize::from(first & 0xF0) << 4 | usize::from(second);
            if len == SHORT_LEN {
                let (&more, rest) = source.split_first().ok_or(Corrupt)?;
                source = rest;
                len += usize::from(more);
            }
            if distance == 0 || distance > at {
                return Err(Corrupt);
            }
            // PostgreSQL lets the last copy reach past the end, and cuts it.
            len = len.min(dest.len() - at);
            repeat(dest, at, distance, len);
            at += len;
        }
    }
    if at == dest.len() && source.is_empty() { Ok(()) } else { Err(Corrupt) }
}

/// Writes `len` bytes at `at`, each being the one `distance` before it. What was just written may be copied again.
fn repeat(dest: &mut [u8], mut at: usize, distance: usize, mut len: usize) {
    let from = at - distance;
    while len > 0 {
        // Everything from `from` up to `at` repeats with that distance, so each round can copy twice as much.
        let take = len.min(at - from);
        dest.copy_within(from..from + take, at);
        at += take;
        len -= take;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decompressed(source: &[u8], len: usize) -> Result<Vec<u8>, Corrupt> {
        let mut dest = vec![0xEE; len];
        decompress(source, &mut dest).map(|()| dest)
    }

    #[test]
    fn bytes_and_copies() {
        assert_eq!(decompressed(&[0, 1, 2, 3], 3).unwrap(), [1, 2, 3]);
        assert_eq!(decompressed(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 9], 9).unwrap(), [1, 2, 3, 4, 5, 6, 7, 8, 9]);
        // "abc", then 5 bytes from 3 before: the copy overlaps itself.
        assert_eq!(decompressed(&[0b1000, b'a', b'b', b'c', 2, 3], 8).unwrap(), b"abcabcab");
        assert_eq!(decompressed(&[0b10, 7, 0x0F, 1, 255], 274).unwrap(), [7; 274]);
    }

    #[test]
    fn distances_use_twelve_bits() {
        let mut source = Vec::new();
        let bytes: Vec<u8> = (0..600u32).map(|n| (n * 7 % 251) as u8).collect();
        for chunk in bytes.chunks(8) {
            source.push(0);
            source.extend(chunk);
        }
        source.extend([1, 0x20, 0x01]);
        let whole = decompressed(&source, 603).unwrap();
        assert_eq!(whole[600..], bytes[600 - 0x201..][..3]);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        assert_eq!(decompressed(&[0, 1, 2], 3), Err(Corrupt), "too short");
        assert_eq!(decompressed(&[0, 1, 2, 3, 4], 3), Err(Corrupt), "too long");
        assert_eq!(decompressed(&[1, 0, 1], 3), Err(Corrupt), "nothing was written yet");
        assert_eq!(decompressed(&[0b10, 7, 0, 0], 4), Err(Corrupt), "no distance");
        assert_eq!(decompressed(&[0b10, 7, 0], 4), Err(Corrupt), "half a copy");
        assert_eq!(decompressed(&[0b10, 7, 0x0F, 1], 40), Err(Corrupt), "no third byte");
        assert_eq!(decompressed(&[0b10, 7, 0x0F, 1, 255], 20).unwrap(), [7; 20], "the last copy is cut");
        assert_eq!(decompressed(&[], 0), Ok(vec![]));
        assert_eq!(decompressed(&[0], 0), Err(Corrupt));
    }

    #[test]
    fn any_bytes_end_in_a_result() {
        let mut state = 1u32;
        for len in 0..2000 {
            let source: Vec<u8> = (0..len % 64)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                })
                .collect();
            let _ = decompressed(&source, len);
        }
    }
}
