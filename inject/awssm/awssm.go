// Package awssm reads secrets of AWS Secrets Manager with aws-sdk-go-v2. It logs in as
// every AWS program does: environment, shared files, container and instance roles.
package awssm

import (
	"context"
	"errors"
	"net/http"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	"github.com/aws/aws-sdk-go-v2/service/secretsmanager"
	"github.com/aws/smithy-go"

	"waybill/inject"
	"waybill/outcome"
)

// Source returns the source of the secret that spec names. Its version is the store's.
func Source(spec inject.AWSSpec, o inject.CacheOptions) *inject.Cached {
	return inject.NewCached(inject.KindAWS, func(ctx context.Context) (inject.Material, error) {
		m, err := fetch(ctx, spec)
		if err != nil {
			return inject.Material{}, failure(ctx, err)
		}
		return m, nil
	}, o)
}

func fetch(ctx context.Context, spec inject.AWSSpec) (inject.Material, error) {
	// A client of our own: no proxy of the environment. A ca_bundle of the shared files is
	// added to it.
	hc := awshttp.NewBuildableClient().WithTransportOptions(func(t *http.Transport) { t.Proxy = nil })
	cfg, err := config.LoadDefaultConfig(ctx, config.WithHTTPClient(hc), config.WithRegion(spec.Region), config.WithRetryMaxAttempts(2))
	if err != nil {
		return inject.Material{}, inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	c := secretsmanager.NewFromConfig(cfg, func(o *secretsmanager.Options) {
		// Where secrets are asked for is in Waybill's configuration, and nowhere else: no
		// endpoint_url of the environment or of a shared file (CONTRACT V2).
		o.BaseEndpoint = nil
		if spec.Endpoint != "" {
			o.BaseEndpoint = aws.String(spec.Endpoint)
		}
	})
	in := &secretsmanager.GetSecretValueInput{SecretId: aws.String(spec.Secret)}
	if spec.Stage != "" {
		in.VersionStage = aws.String(spec.Stage)
	}
	out, err := c.GetSecretValue(ctx, in)
	if err != nil {
		return inject.Material{}, err
	}
	text := out.SecretBinary
	if out.SecretString != nil {
		text = []byte(*out.SecretString)
	}
	raw, err := inject.Field(text, spec.Field)
	clear(text)
	if err != nil {
		return inject.Material{}, err
	}
	return inject.Material{Raw: raw, Version: "v" + aws.ToString(out.VersionId)}, nil
}

// failure classifies by the service's own codes.
func failure(ctx context.Context, err error) error {
	var own *inject.Error
	var api smithy.APIError
	var answer interface{ HTTPStatusCode() int }
	var broken *smithy.DeserializationError
	is := func(code outcome.Code, reason string) error { return inject.NewError(code, reason, nil) }
	switch {
	case errors.As(err, &own):
		return own
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &broken):
		return is(outcome.CodeCredentialInvalid, inject.ReasonMalformed)
	case errors.As(err, &api):
		switch api.ErrorCode() {
		case "ResourceNotFoundException":
			return is(outcome.CodeCredentialMissing, inject.ReasonNotSet)
		case "DecryptionFailure", "InvalidParameterException", "InvalidRequestException":
			return is(outcome.CodeCredentialInvalid, inject.ReasonMalformed)
		case "InternalServiceError", "ThrottlingException", "ServiceUnavailable":
			return is(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable)
		}
		if errors.As(err, &answer) && answer.HTTPStatusCode() >= http.StatusInternalServerError {
			return is(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable)
		}
		return is(outcome.CodeCredentialRefused, inject.ReasonDenied)
	}
	return is(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable)
}
