//! How messages of both directions are built.

/// Writes type, length word and what `body` appends. The length counts itself, not the type.
pub(crate) fn framed(out: &mut Vec<u8>, tag: Option<u8>, body: impl FnOnce(&mut Vec<u8>)) {
    out.extend(tag);
    let at = out.len();
    out.extend([0; 4]);
    body(out);
    let length = (out.len() - at) as u32;
    out[at..at + 4].copy_from_slice(&length.to_be_bytes());
}

/// Writes a text and the zero that ends it, which the text must not hold.
pub(crate) fn cstr(out: &mut Vec<u8>, text: &str) {
    debug_assert!(!text.contains('\0'));
    out.extend(text.as_bytes());
    out.push(0);
}

/// Writes what `body` appends and counts, after the count in two bytes. At most 65,535.
pub(crate) fn counted(out: &mut Vec<u8>, body: impl FnOnce(&mut Vec<u8>) -> usize) {
    let at = out.len();
    out.extend([0; 2]);
    let count = u16::try_from(body(out)).expect("the protocol counts columns and parameters in two bytes");
    out[at..at + 2].copy_from_slice(&count.to_be_bytes());
}

/// Writes the number of the values, and each of them with its length, or null. At most 65,535.
pub(crate) fn values<'a>(out: &mut Vec<u8>, values: impl IntoIterator<Item = Option<&'a [u8]>>) {
    counted(out, |out| {
        let write = |value: Option<&[u8]>| match value {
            None => out.extend((-1_i32).to_be_bytes()),
            Some(bytes) => {
                out.extend((bytes.len() as u32).to_be_bytes());
                out.extend(bytes);
            }
        };
        values.into_iter().map(write).count()
    });
}
