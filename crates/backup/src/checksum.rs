//! Checksums of files in manifests (`common/checksum_helper.c`, PostgreSQL 18).

use sha2::{Digest, Sha224, Sha256, Sha384, Sha512};

/// How files are checksummed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksums {
    /// Not at all.
    None,
    /// CRC-32C.
    Crc32c,
    /// SHA-224.
    Sha224,
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

impl Checksums {
    const ALL: [Checksums; 6] = [
        Checksums::None,
        Checksums::Crc32c,
        Checksums::Sha224,
        Checksums::Sha256,
        Checksums::Sha384,
        Checksums::Sha512,
    ];

    /// By their name, in whatever case.
    pub fn parse(name: &str) -> Option<Checksums> {
        Checksums::ALL.into_iter().find(|known| known.name().eq_ignore_ascii_case(name))
    }

    /// Its name in a manifest.
    pub fn name(self) -> &'static str {
        match self {
            Checksums::None => "NONE",
            Checksums::Crc32c => "CRC32C",
            Checksums::Sha224 => "SHA224",
            Checksums::Sha256 => "SHA256",
            Checksums::Sha384 => "SHA384",
            Checksums::Sha512 => "SHA512",
        }
    }
}

/// The checksum of a file, while it is read.
pub enum Sum {
    /// None.
    None,
    /// CRC-32C.
    Crc32c(crc_fast::Digest),
    /// SHA-224.
    Sha224(Sha224),
    /// SHA-256.
    Sha256(Sha256),
    /// SHA-384.
    Sha384(Sha384),
    /// SHA-512.
    Sha512(Sha512),
}

impl Sum {
    /// Of nothing yet.
    pub fn new(checksums: Checksums) -> Sum {
        match checksums {
            Checksums::None => Sum::None,
            Checksums::Crc32c => Sum::Crc32c(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi)),
            Checksums::Sha224 => Sum::Sha224(Sha224::new()),
            Checksums::Sha256 => Sum::Sha256(Sha256::new()),
            Checksums::Sha384 => Sum::Sha384(Sha384::new()),
            Checksums::Sha512 => Sum::Sha512(Sha512::new()),
        }
    }

    /// More of the file.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Sum::None => {}
            Sum::Crc32c(sum) => sum.update(bytes),
            Sum::Sha224(sum) => sum.update(bytes),
            Sum::Sha256(sum) => sum.update(bytes),
            Sum::Sha384(sum) => sum.update(bytes),
            Sum::Sha512(sum) => sum.update(bytes),
        }
    }

    /// Its algorithm's name and the digits.
    pub fn finish(self) -> Option<(&'static str, String)> {
        Some(match self {
            Sum::None => return None,
            // As the number lies in memory (`pg_checksum_final`).
            Sum::Crc32c(sum) => (Checksums::Crc32c.name(), hex(&(sum.finalize() as u32).to_le_bytes())),
            Sum::Sha224(sum) => (Checksums::Sha224.name(), hex(&sum.finalize())),
            Sum::Sha256(sum) => (Checksums::Sha256.name(), hex(&sum.finalize())),
            Sum::Sha384(sum) => (Checksums::Sha384.name(), hex(&sum.finalize())),
            Sum::Sha512(sum) => (Checksums::Sha512.name(), hex(&sum.finalize())),
        })
    }
}

/// As hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of "abc".
    fn abc(checksums: Checksums) -> Option<(&'static str, String)> {
        let mut sum = Sum::new(checksums);
        sum.update(b"a");
        sum.update(b"bc");
        sum.finish()
    }

    #[test]
    fn checksums_are_those_of_pg_verifybackup() {
        assert_eq!(abc(Checksums::None), None);
        // 0x364B3FB7, the last byte first.
        assert_eq!(abc(Checksums::Crc32c), Some(("CRC32C", "b73f4b36".to_owned())));
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(abc(Checksums::Sha256), Some(("SHA256", sha256.to_owned())));
        let lengths = [Checksums::Sha224, Checksums::Sha384, Checksums::Sha512].map(|sum| abc(sum).unwrap().1.len());
        assert_eq!(lengths, [56, 96, 128]);
        assert_eq!(Checksums::parse("sha512"), Some(Checksums::Sha512));
        assert_eq!(Checksums::parse("md5"), None);
    }
}
