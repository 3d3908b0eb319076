use walrider_seed::Random;

use super::*;

const SECRET: &str = "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY=:\
                      wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU=";
const SCRAM: Verdict = Verdict::Scram { client_cert: None };

fn peer(address: &str, tls: bool) -> Peer {
    Peer { address: (address != "local").then(|| address.parse().unwrap()), tls }
}

fn rules(text: &str) -> Rules {
    Rules::parse(text).unwrap_or_else(|error| panic!("{error}"))
}

/// A rule of these lines.
fn one(lines: &str) -> Result<Rules, RulesError> {
    Rules::parse(&format!("[[allow]]\n{lines}"))
}

#[test]
fn nobody_is_served_without_rules() {
    for rules in [Rules::default(), rules(""), rules(&format!("[users]\nu = '{SECRET}'"))] {
        for address in ["local", "127.0.0.1", "::1", "10.0.0.1"] {
            assert_eq!(rules.decide(&peer(address, false), "u"), Verdict::Reject);
            assert_eq!(rules.fitting(&peer(address, true), "u"), None);
        }
    }
}

#[test]
fn the_first_rule_that_fits_decides() {
    let text = format!(
        r#"
        [[allow]]
        from = ["10.0.0.66"]
        method = "reject"
        [[allow]]
        from = ["10.0.0.0/8", "::1/128"]
        user = ["replicator", "other"]
        tls = "require"
        method = "scram-sha-256"
        clientcert = "verify-ca"
        [[allow]]
        from = ["10.0.0.0/8"]
        tls = "refuse"
        method = "scram-sha-256"
        [[allow]]
        from = ["192.168.0.0/16"]
        method = "cert"
        [[allow]]
        from = ["local", "loopback"]
        user = ["root"]
        method = "trust"
        [users]
        replicator = "{SECRET}"
        "#
    );
    let rules = rules(&text);
    let with_cert = Verdict::Scram { client_cert: Some(ClientCert::VerifyCa) };
    let cert = Verdict::Cert { client_cert: ClientCert::VerifyFull };
    let cases = [
        ("10.0.0.66", true, "replicator", Verdict::Reject, Some(1)),
        ("10.0.0.65", true, "replicator", with_cert, Some(2)),
        ("::ffff:10.0.0.65", true, "other", with_cert, Some(2)),
        ("::ffff:10.0.0.66", true, "other", Verdict::Reject, Some(1)),
        ("::1", true, "replicator", with_cert, Some(2)),
        ("::1", true, "Replicator", Verdict::Reject, None),
        ("10.255.255.255", false, "replicator", SCRAM, Some(3)),
        ("10.0.0.1", true, "root", Verdict::Reject, None),
        ("11.0.0.0", false, "replicator", Verdict::Reject, None),
        ("192.168.3.4", true, "anybody", cert, Some(4)),
        ("192.168.3.4", false, "anybody", Verdict::Reject, None),
        ("local", false, "root", Verdict::Trust, Some(5)),
        ("127.9.9.9", false, "root", Verdict::Trust, Some(5)),
        ("::1", false, "root", Verdict::Trust, Some(5)),
        ("::2", false, "root", Verdict::Reject, None),
        ("local", false, "replicator", Verdict::Reject, None),
    ];
    for (address, tls, user, verdict, number) in cases {
        let peer = peer(address, tls);
        assert_eq!(
            (rules.decide(&peer, user), rules.fitting(&peer, user)),
            (verdict, number),
            "{address} {tls} {user}"
        );
    }
    assert!(rules.secret("replicator").is_some() && rules.secret("root").is_none() && rules.secrets().count() == 1);
    assert!(rules.needs_tls() && rules.needs_client_ca());
    assert!(!format!("{rules:?}").contains("W22Z"));
}

#[test]
fn all_is_everything_and_networks_are_of_their_kind() {
    let all = one("from = ['all']\nmethod = 'scram-sha-256'").unwrap();
    let four = one("from = ['0.0.0.0/0']\nmethod = 'scram-sha-256'").unwrap();
    let six = one("from = ['::/0']\nmethod = 'scram-sha-256'").unwrap();
    for (address, expected) in
        [("1.2.3.4", [true, false]), ("::ffff:1.2.3.4", [true, false]), ("fd00::1", [false, true])]
    {
        let decided = [&four, &six].map(|rules| rules.decide(&peer(address, false), "u") == SCRAM);
        assert_eq!(decided, expected);
        assert_eq!(all.decide(&peer(address, true), "u"), SCRAM);
    }
    assert_eq!(all.decide(&peer("local", false), "u"), SCRAM);
    assert_eq!(four.decide(&peer("local", false), "u"), Verdict::Reject);
    assert!(!all.needs_tls() && !all.needs_client_ca());
    // As a firewall's tables write them.
    let mapped = one("from = ['::ffff:10.0.0.0/104', '10.1.2.3/8']\nmethod = 'reject'").unwrap();
    assert_eq!(mapped.fitting(&peer("10.200.0.1", false), "u"), Some(1));
}

#[test]
fn trust_is_for_this_host() {
    let trust = |from: &str, rest: &str| one(&format!("from = [{from}]\nmethod = 'trust'\n{rest}"));
    for from in
        ["'local'", "'loopback'", "'127.0.0.0/8'", "'127.1.2.3'", "'::1'", "'::1/128', 'local'", "'::ffff:127.0.0.1'"]
    {
        assert!(trust(from, "").is_ok(), "{from}");
    }
    for from in ["'all'", "'local', '10.0.0.1'", "'127.0.0.0/7'", "'0.0.0.0/0'", "'::1/127'", "'::/0'"] {
        let error = trust(from, "").unwrap_err().to_string();
        assert!(error.starts_with("rule 1: ") && error.contains("insecure = true"), "{error}");
        let rules = trust(from, "insecure = true").unwrap();
        assert!(!rules.needs_tls());
    }
    assert_eq!(trust("'all'", "insecure = true").unwrap().decide(&peer("9.9.9.9", false), "u"), Verdict::Trust);
}

#[test]
fn a_wrong_rule_is_named_and_says_what_to_do() {
    let cases = [
        ("from = []\nmethod = 'reject'", "\"from\" is empty"),
        ("method = 'reject'", "missing field `from`"),
        ("from = ['all']", "missing field `method`"),
        ("from = ['all']\nmethod = 'md5'", "unknown variant `md5`, expected one of `scram-sha-256`, `cert`"),
        ("from = ['all']\nmethod = 'reject'\nusers = ['u']", "unknown field `users`, expected one of `from`, `user`"),
        ("from = 'all'\nmethod = 'reject'", "expected a sequence"),
        ("from = ['db.example.com']\nmethod = 'reject'", "names of hosts are not supported"),
        ("from = ['10.0.0.0/33']\nmethod = 'reject'", "is not a network"),
        ("from = ['10.0.0.0/+8']\nmethod = 'reject'", "is not a network"),
        ("from = ['10.0.0.0/']\nmethod = 'reject'", "is not a network"),
        ("from = ['10.0.0/8']\nmethod = 'reject'", "is not a network"),
        ("from = ['::/129']\nmethod = 'reject'", "is not a network"),
        ("from = ['::ffff:10.0.0.0/8']\nmethod = 'reject'", "is not a network"),
        ("from = ['all']\nuser = []\nmethod = 'reject'", "\"user\" is empty"),
        ("from = ['all']\nuser = ['all']\nmethod = 'reject'", "take \"user\" away"),
        ("from = ['all']\nuser = ['+group']\nmethod = 'reject'", "name the users"),
        ("from = ['all']\nuser = ['']\nmethod = 'reject'", "is empty"),
        ("from = ['all']\nmethod = 'cert'\ntls = 'refuse'", "without TLS"),
        ("from = ['all']\nmethod = 'cert'\nclientcert = 'verify-ca'", "take clientcert away"),
        ("from = ['all']\nmethod = 'scram-sha-256'\ntls = 'refuse'\nclientcert = 'verify-ca'", "without TLS"),
        ("from = ['local']\nmethod = 'trust'\nclientcert = 'verify-ca'", "use method \"cert\""),
        ("from = ['local']\nmethod = 'cert'", "take \"local\" away"),
        ("from = ['local']\nmethod = 'scram-sha-256'\ntls = 'require'", "take \"local\" away"),
        ("from = ['all']\nmethod = 'reject'\ninsecure = true", "take it away"),
        ("from = ['all']\nmethod = 'reject'\ntls = 'verify'", "expected `require` or `refuse`"),
    ];
    for (lines, expected) in cases {
        let good = "[[allow]]\nfrom = ['all']\nmethod = 'reject'\n";
        let error = Rules::parse(&format!("{good}[[allow]]\n{lines}")).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("rule 2: ") && text.contains(expected) && !text.contains('\n'), "{lines}: {text}");
    }
    let error = Rules::parse("[allow]\nfrom = ['all']\nmethod = 'reject'").unwrap_err();
    assert!(error.to_string().contains("write [[allow]]"), "{error}");
    let error = Rules::parse("allow = [1]").unwrap_err();
    assert!(error.to_string().contains("rule 1: it is not a table"), "{error}");
    let error = Rules::parse("\n[[alow]]\n").unwrap_err();
    assert!(error.to_string().contains("line 2: unknown field `alow`"), "{error}");
}

#[test]
fn a_password_is_refused_and_never_shown() {
    let forms = [
        "[users]\nreplicator = 'hunter2'",
        "[users]\nreplicator = 'SCRAM-SHA-256$hunter2'",
        "[users]\nreplicator = ['hunter2']",
        "[users]\nreplicator = { password = 'hunter2' }",
        "[users]\nreplicator = hunter2",
        "[users]\nreplicator = 'hunter2",
        "[users]\nreplicator = \"hunter2",
        "[users]\nreplicator = 2hunter2",
        "[users]\nreplicator = \"\\hunter2\"",
        "[users]\nreplicator = 'a' hunter2",
        "users = 'hunter2'",
        "users = ['hunter2']",
    ];
    for form in forms {
        let error = Rules::parse(form).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter"), "{form}: {error}");
    }
    let error = Rules::parse("[users]\nreplicator = 123456").unwrap_err();
    assert!(!error.to_string().contains("123456"), "{error}");
    let error = Rules::parse("[users]\n\"o'neill\" = 'hunter2'").unwrap_err().to_string();
    assert!(error.starts_with("[users], \"o'neill\": ") && error.contains("FROM pg_authid"), "{error}");
    assert!(error.ends_with("SELECT rolpassword FROM pg_authid WHERE rolname = 'o''neill'"), "{error}");
    let error = Rules::parse("[users]\nu = 'md5d41d8cd98f00b204e9800998ecf8427e'").unwrap_err().to_string();
    assert!(error.contains("password_encryption = 'scram-sha-256'") && !error.contains("d41d"), "{error}");
    let error = Rules::parse(&format!("[users]\nu = '{}'", &SECRET[..60])).unwrap_err().to_string();
    assert!(error.contains("copy it again") && !error.contains("W22Z"), "{error}");
}

/// Says it again with text: the first digits of both addresses are equal.
fn begins_alike(network: &Network, address: IpAddr) -> bool {
    let digits = |address| match address {
        IpAddr::V4(address) => format!("4{:032b}", address.to_bits()),
        IpAddr::V6(address) => format!("6{:0128b}", address.to_bits()),
    };
    let prefix = 1 + usize::from(network.prefix);
    digits(network.address)[..prefix] == digits(address)[..prefix]
}

#[test]
fn any_network_and_any_text() {
    let good = format!(
        "[[allow]]\nfrom = ['10.0.0.0/8', 'local']\nuser = ['u']\ntls = 'refuse'\nmethod = 'scram-sha-256'\n[[allow]]\n\
         from = ['all']\nmethod = 'cert'\nclientcert = 'verify-full'\n[users]\nu = '{SECRET}'\n"
    );
    rules(&good);
    let mut inside = 0;
    walrider_seed::rounds(5_000, |seed| {
        let mut random = Random(seed);
        let bits = (u128::from(random.number()) << 64) | u128::from(random.number());
        let four = random.one_in(2);
        let address = |bits| match four {
            true => IpAddr::V4(Ipv4Addr::from_bits(bits as u32)),
            false => IpAddr::V6(Ipv6Addr::from_bits(bits)),
        };
        let first = address(bits);
        let second = address(bits ^ 1_u128.checked_shl(random.below(140) as u32).unwrap_or(0));
        let prefix = random.below(if first.is_ipv4() { 33 } else { 129 });
        let network = Network::parse(&format!("{first}/{prefix}")).unwrap();
        assert!(network.contains(first));
        assert_eq!(network.contains(second), begins_alike(&network, second), "{network:?} {second}");
        inside += u64::from(network.contains(second));
        let spoiled = random.spoiled(&[good.as_bytes().to_vec()], b"\"'[]={}/.:#\n,\\ ");
        if let Ok(rules) = Rules::parse(&String::from_utf8_lossy(&spoiled)) {
            // No slip of the pen lets in without proof.
            assert_ne!(rules.decide(&Peer { address: Some(first), tls: random.one_in(2) }, "u"), Verdict::Trust);
        }
    });
    assert!(inside > 0);
}
