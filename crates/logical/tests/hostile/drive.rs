//! Arbitrary bytes through the decoder. Shared with the target under `fuzz/`.

use walrider_logical::message::{Decoder, Protocol};
use walrider_logical::testing::encode;

/// As a stream in each protocol: a length of two bytes, and a message. What is read is written again as long as it was, and read as
/// the same again.
pub fn everything(bytes: &[u8]) {
    for protocol in Protocol::ALL {
        let mut decoder = Decoder::new(protocol);
        let mut rest = bytes;
        while let Some((len, after)) = rest.split_first_chunk() {
            let Some((body, after)) = after.split_at_checked(u16::from_be_bytes(*len).into()) else { break };
            let before = decoder.clone();
            if let Ok(message) = decoder.decode(body) {
                let written = encode(&message);
                // To a schema that is spelled out, though it need not be, PostgreSQL would say nothing.
                assert!(written.len() <= body.len());
                assert_eq!(before.clone().decode(&written).as_ref(), Ok(&message));
            }
            rest = after;
        }
    }
}
